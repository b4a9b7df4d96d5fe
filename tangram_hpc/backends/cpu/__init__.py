"""What a process may use of this machine's cores, and how running trees are moved on them."""
