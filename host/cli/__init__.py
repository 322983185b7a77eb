"""The subcommands of `pbhost`, one module each."""
