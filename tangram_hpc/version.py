"""The version of this package; nothing else. docs/RELEASING.md says what it means."""

VERSION = "0.1.0.dev0"
