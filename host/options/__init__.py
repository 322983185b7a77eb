"""The options of a server: declared, validated, and read from the command line."""
