"""Key/value caches in buffers that past and present share (`optimize --kv-cache shared`)."""

from onnxfuse.lower.shared_cache.native import lift_attention
from onnxfuse.lower.shared_cache.rewrite import SharedCache, share

__all__ = ["SharedCache", "lift_attention", "share"]
