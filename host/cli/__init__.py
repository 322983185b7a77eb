"""The subcommands of `pbhost`, each of them in a module of its own."""
