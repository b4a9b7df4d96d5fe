"""The report of a job: figures, advice and plots on one page that needs no network.

The package computes what a page shows and writes the page. All figures come from the records of
`accounting/`, so that they equal those of `tangram acct`; what the job would have needed otherwise
comes from `simulator/savings/`. Nothing here reads a journal, prints, or talks to a broker.
"""
