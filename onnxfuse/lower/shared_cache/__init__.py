"""Key/value caches in buffers that past and present share (`optimize --kv-cache shared`)."""

from onnxfuse.lower.shared_cache.rewrite import SharedCache, share

__all__ = ["SharedCache", "share"]
