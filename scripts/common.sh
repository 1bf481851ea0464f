# Shared by the scripts: a Python, a virtual environment, installing this tree into it. Sourced, not run.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONSAFEPATH=1
venv="${KERNELWRIGHT_VENV:-.venv}"

say() { printf '\n== %s\n' "$*"; }
fail() { printf '\nFAILED: %s\n' "$*" >&2; exit 1; }

new_enough() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-} python3 python3.12 python3.11 python3.13 python; do
        if new_enough "$candidate"; then command -v "$candidate"; return; fi
    done
    fail "Python 3.11 or newer is needed and none was found; install one, or name it: PYTHON=/path/to/python3 $0"
}

use_venv() {
    if [ ! -x "$venv/bin/python" ]; then
        local base
        base="$(find_python)" || exit 1
        say "virtual environment in $venv ($("$base" --version))"
        "$base" -m venv "$venv" || fail "could not make a virtual environment; on Debian and Ubuntu: apt install python3-venv"
    fi
    new_enough "$venv/bin/python" || fail "$venv has no working Python 3.11 or newer; delete the folder and try again"
    python="$PWD/$venv/bin/python"
    [ "${venv#/}" = "$venv" ] || python="$venv/bin/python"
}

# Browser tests drive Debian's Chromium; without it they are skipped.
use_browser() {
    if command -v chromium >/dev/null && command -v chromedriver >/dev/null; then return; fi
    if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
        say "Chromium for the browser tests"
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium chromium-driver fonts-dejavu-core; } >/dev/null && return
    fi
    say "browser tests are skipped: they need chromium and chromedriver (on Debian: apt install chromium chromium-driver)"
}

# Pip installs a local folder anew each time, so what is tested is this tree; left-over build folders would put deleted
# files back into it.
install_tree() { # install_tree EXTRAS [CONSTRAINTS]
    rm -rf build ./*.egg-info src/*.egg-info
    "$python" -m pip install --quiet --constraint "${2:-constraints.txt}" ".$1" || fail "pip could not install Kernelwright and what it needs"
    rm -rf build ./*.egg-info src/*.egg-info
}
