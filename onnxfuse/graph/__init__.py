"""A thin layer over ONNX GraphSurgeon: read, query and edit a graph. It knows nothing of rules."""
