"""The backend `onnxruntime`: models in the ONNX format."""
