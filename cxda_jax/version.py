"""The package's version, alone here so that building the package imports nothing."""

VERSION = "0.3.0"
