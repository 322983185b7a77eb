"""The backend `tensorrt`: engines of TensorRT, on GPUs."""
