"""The backend `tensorrt`: TensorRT engines, on GPUs."""
