"""The ops of the `onnxfuse` and `onnxfuse.std` domains: signatures, meaning, function bodies and cost."""
