"""The Pythons that models run on if not on the host's: found, unpacked, built, looked at."""
