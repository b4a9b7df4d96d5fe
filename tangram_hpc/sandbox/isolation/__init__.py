"""Means to confine a process: Landlock, system call filters, namespaces and container runtimes.

Each module puts one means in force or builds one view of the file system. Which sandbox gets which
isolation is decided in `sandbox/manager`, and `sandbox/process/isolation_setup.py` applies it.
"""
