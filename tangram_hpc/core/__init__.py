"""Pure decisions: events in, decisions out. No clock, no socket, no randomness of its own."""
