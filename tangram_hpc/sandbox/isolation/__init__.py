"""Ways to confine a process: Landlock, system call filters, namespaces and container runtimes.

Each module applies one of them or says what is visible. Which sandbox gets which isolation is
decided in `sandbox/manager`, and `sandbox/process/isolation_setup.py` applies it.
"""
