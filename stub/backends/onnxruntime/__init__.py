"""The backend `onnxruntime`: models in ONNX's format."""
