# Makes the Python environment of one_machine.sh and four_machines.sh, which source this file in the
# root of the checkout, and puts its interpreter into `python`.
#
# The environment counts only once it is marked as ready, after everything is installed, so a start
# that failed is done again. It is made anew for another PYTHON and for other dependencies. Machines
# that share the checkout take turns, and the first one makes it for all. If the file system cannot
# lock files, each machine gets an environment of its own.

PYTHON=${PYTHON:-python3}
environment=.venv-gpu
exec 9>.venv-gpu.lock
if ! flock 9 2>/dev/null; then
  environment=.venv-gpu-$(uname -n)
fi
made_of="$("$PYTHON" -c 'import sys; print(sys.executable, sys.version)')
$(cksum <pyproject.toml)"
if [ "$(cat "$environment/.ready" 2>/dev/null)" != "$made_of" ]; then
  rm -rf "$environment"
  "$PYTHON" -m venv "$environment"
  # The CUDA build of torch that pip chooses for this platform.
  "$environment/bin/python" -m pip install --quiet 'torch>=2.11' .
  printf '%s\n' "$made_of" >"$environment/.ready"
fi
exec 9>&-
python=$environment/bin/python
