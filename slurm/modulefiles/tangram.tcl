#%Module
# tangram_hpc for Environment Modules (Tcl). Copy it to MODULEPATH/tangram/VERSION: the version is the
# file's name. It changes PATH and names the site's settings; it starts nothing and reads no user's
# file. A virtual environment in $base/VERSION, made by
#     python3 -m venv /opt/tangram/VERSION && /opt/tangram/VERSION/bin/pip install '.[mpi]'  (in a checkout)
# must be on a file system that all nodes share, and readable by all.

set base /opt/tangram   ;# edit this; TANGRAM_MODULE_BASE overrides it
if {[info exists env(TANGRAM_MODULE_BASE)]} { set base $env(TANGRAM_MODULE_BASE) }
set version [file tail [module-info name]]
set root $base/$version

proc ModulesHelp {} {
    puts stderr "`tangram` and the Python package tangram_hpc. Begin with: tangram doctor"
}
module-whatis "tangram_hpc $version: a Slurm job-step broker for agentic RL"
conflict tangram

if {[module-info mode load] && ![file executable $root/bin/tangram]} {
    puts stderr "tangram/$version: there is no $root/bin/tangram; ask your administrator"
    break
}
prepend-path PATH $root/bin
setenv TANGRAM_HPC_ROOT $root
# The site's defaults (docs/GETTING_STARTED.md, Settings), for users who have not set TANGRAM_CONFIG.
set settings $root/tangram.toml
if {[file readable $settings] &&
    (![info exists env(TANGRAM_CONFIG)] || $env(TANGRAM_CONFIG) eq $settings)} {
    setenv TANGRAM_CONFIG $settings
}
