"""For tests: many `tangram` command lines in one process; what each said, as JSON."""

import contextlib
import io
import json
import os
import sys

from tangram_hpc.cli import main

told, clean = [], dict(os.environ)
for words, environ in json.loads(sys.argv[1]):
    os.environ.clear()
    os.environ.update({**clean, **environ})
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(words)
    told.append([words, environ, status, out.getvalue(), err.getvalue()])
print(json.dumps(told))
