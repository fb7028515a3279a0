# shellcheck shell=bash disable=SC2034,SC2153,SC2154
# What every part of hack/cluster shares: folders, progress, logs, the lock, packages.

: "${HOME:=/root}"
CACHE=${AI_INFERENCE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/ai-inference}
CLUSTER=${AI_INFERENCE_CLUSTER:-ai-inference}
STATE=$CACHE/clusters/$CLUSTER
KUBECONFIG_FILE=$STATE/kubeconfig
LOGS=$CACHE/logs

# The administrator's tools are not on every user's path.
PATH=$PATH:/usr/sbin:/sbin

# Progress has to reach the terminal from steps whose own output goes to a log.
exec 3>&2

current_log=
exit_steps=()

log() {
  printf '[%3ds] %s\n' "$SECONDS" "$*" >&3
}

die() {
  printf 'hack/cluster: %s\n' "$*" >&3
  exit 1
}

on_exit() {
  local status=$? step
  for step in "${exit_steps[@]}"; do
    "$step"
  done
  if ((status)) && [[ -s $current_log ]]; then
    printf '%s\n' '--- last lines of the log ---' >&3
    tail -n 20 "$current_log" >&3
    printf '%s\n' "--- failed; the whole log: $current_log" >&3
  fi
}
trap on_exit EXIT

# quietly LOG COMMAND…: sends the output to a log; on_exit shows its end when the command fails.
# Call it, and whatever calls it, outside of conditions: there bash ignores failures.
quietly() {
  mkdir -p "$LOGS"
  current_log=$LOGS/$1.log
  shift
  "$@" >"$current_log" 2>&1
  current_log=
}

# wait_until SECONDS COMMAND…: polls a condition that nothing announces.
wait_until() {
  local deadline=$((SECONDS + $1))
  shift
  until "$@"; do
    ((SECONDS < deadline)) || return 1
    sleep 0.2
  done
}

# lock FD NAME [FLOCK OPTION…]: holds a lock until the descriptor is closed. Whatever outlives this
# run has to be started without it.
lock() {
  local descriptor=$1 name=$2
  shift 2
  mkdir -p "$CACHE"
  eval "exec $descriptor>\"\$CACHE/$name.lock\""
  flock -n "$@" "$descriptor" && return
  log "waiting for another hack/cluster to finish ($name)"
  flock "$@" "$descriptor"
}

# What changes clusters, images or the daemon holds this alone; `-s` is for what only uses them.
lock_clusters() {
  lock 9 clusters "$@"
}

hash_text() {
  sha256sum | cut -c1-12
}

require_root() {
  [[ $(id -u) == 0 ]] || die "$1 needs root"
}

# install_missing PROBE=PACKAGE…: a probe is a command's name or an absolute path.
install_missing() {
  local pair probe packages=()
  for pair; do
    probe=${pair%%=*}
    if [[ $probe == /* ]]; then
      [[ -e $probe ]] && continue
    else
      command -v "$probe" >/dev/null && continue
    fi
    packages+=("${pair#*=}")
  done
  ((${#packages[@]})) || return 0
  require_root "installing ${packages[*]}"
  log "installing from Debian: ${packages[*]}"
  quietly apt-update apt-get update
  quietly apt-install env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "${packages[@]}"
}
