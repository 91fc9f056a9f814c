"""Everything that touches ONNX Runtime: the custom-op library, sessions, inputs and timing."""
