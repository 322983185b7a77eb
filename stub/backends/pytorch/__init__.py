"""The backend `pytorch`: TorchScript, exported programs, and compiled ones."""
