-- tangram_hpc for Lmod. Copy it to MODULEPATH/tangram/VERSION.lua: the version is the file's name.
-- Law: it changes PATH and names the site's settings; it starts nothing and reads no user's file.
-- A venv in BASE/VERSION, made by
--     python3 -m venv /opt/tangram/VERSION && /opt/tangram/VERSION/bin/pip install '.[mpi]'  (in a checkout)
-- must be on a file system that all nodes share, and readable by all.

local base = os.getenv("TANGRAM_MODULE_BASE") or "/opt/tangram"   -- edit this
local version = myModuleVersion()
local root = pathJoin(base, version)

help([[`tangram` and the Python package tangram_hpc. Begin with: tangram doctor]])
whatis("Name: tangram_hpc")
whatis("Version: " .. version)
whatis("Description: a Slurm job-step broker for agentic RL")
conflict("tangram")

if mode() == "load" and not isFile(pathJoin(root, "bin", "tangram")) then
   LmodError("tangram/" .. version .. ": there is no " .. root .. "/bin/tangram; ask your administrator")
end
prepend_path("PATH", pathJoin(root, "bin"))
setenv("TANGRAM_HPC_ROOT", root)
-- The site's defaults (docs/GETTING_STARTED.md, Settings), for whoever has none of his own.
local settings = pathJoin(root, "tangram.toml")
local named = os.getenv("TANGRAM_CONFIG")
if isFile(settings) and (not named or named == settings) then
   setenv("TANGRAM_CONFIG", settings)
end
