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

# Readers of a cluster share the lock (`lock -s`); what builds, creates or deletes holds it alone.
lock() {
  mkdir -p "$CACHE"
  exec 9>"$CACHE/lock"
  flock -n "$@" 9 && return
  log "waiting for another hack/cluster to finish"
  flock "$@" 9
}

# hash_of FILE…: one short key for the files' names and content.
hash_of() {
  sha256sum -- "$@" | sha256sum | cut -c1-12
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
