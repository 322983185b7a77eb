"""What would keep models from being served, found without serving them: `pbhost check`."""
