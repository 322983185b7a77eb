"""The backend `pytorch`: TorchScript, exported programs, and AOTInductor packages."""
