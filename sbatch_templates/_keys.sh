# Fill it in with   tangram template render <TEMPLATE> -o KEY=VALUE ... --output job.sbatch
# or by hand. Whatever is left as <LIKE_THIS> stops the job at once with one line, and
# `tangram template check job.sbatch` says it before. `-o KEY=` (nothing after the =) removes the line
# of an optional key. Keys, with their defaults; those without a default are yours to give:
#
#: job_name=tangram          name of the job
#: time=01:00:00             limit of the whole job
#: warn=120                  seconds before the limit at which the job ends in order: its programs hear
#:                           SIGTERM and have half of that time
#: requeues=0                how often the job then starts again, if its work was not done by itself
#: account=                  (optional) account
#: qos=                      (optional) QOS
#: setup=                    (optional) shell command that makes `tangram` and your program callable,
#:                           such as "module load python && source ~/tangram/bin/activate"
#: config=                  (optional) settings file, such as tangram.toml: the folder's own is not read
#:                           unless it is named here or by TANGRAM_CONFIG
