"""The operating system: CPUs, private directories, regular files, standard streams."""
