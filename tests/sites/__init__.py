"""The matrix of sites: ordinary jobs on clusters that are configured as sites do it."""
