"""What a job's actions would have needed under other placers and on smaller allocations.

The job's journal becomes a workload, and the simulator plays it. Nothing here reads a file or
prints.
"""
