# Fill this template in with   tangram template render <TEMPLATE> -o KEY=VALUE ... --output job.sbatch
# or by hand. A placeholder <LIKE_THIS> that is left ends the job at once with one line;
# `tangram template check job.sbatch` finds it before. `-o KEY=` (nothing after the =) removes the line
# of an optional key. The keys follow, with their defaults; a key without a default needs a value:
#
#: job_name=tangram          name of the job
#: time=01:00:00             limit of the whole job
#: warn=120                  seconds before the limit at which the job begins to end: its programs get
#:                           SIGTERM and have half of that time
#: requeues=0                how often the job then starts again, if its work had not ended before
#: account=                  (optional) account
#: qos=                      (optional) QOS
#: setup=                    (optional) shell command that makes `tangram` and your program callable,
#:                           such as "module load python && source ~/tangram/bin/activate"
#: config=                  (optional) settings file; a tangram.toml in the current folder is read only
#:                           if it is named here or by TANGRAM_CONFIG
