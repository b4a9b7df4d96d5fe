"""Golden files: what the package did on the day they were made, and the check that it still does.

Moving and renaming code must change nothing for users, for files on disk and for processes of the
same protocol. Each part of that promise is collected here from the running code, compared with a
file below `data/`, and every difference is one line. `make golden` runs the check and
`make golden-update` writes the files; `docs/GOLDEN.md` says how to use both.

The files form two classes:

- *frozen* (`data/frozen`): must stay equal. Decisions, placements, records of simulated runs, exit
  codes, keys of `--json`, wire layouts, journals.
- *listed* (`data/listed`): may change only as `renames.toml` says. Public names, settings,
  environment variables, template keys, verbs and options, texts.
"""
