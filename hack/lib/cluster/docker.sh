# shellcheck shell=bash disable=SC2034,SC2153,SC2154
# The Docker daemon: one that answers already, or an own one that shares nothing with any other.

OWN_DOCKER=$CACHE/docker
# Sockets have a short limit for the length of their path, and a reboot has to clear these.
OWN_RUN=/run/ai-inference/$(printf '%s' "$CACHE" | hash_text)
OWN_HOST=unix://$OWN_RUN/docker.sock

docker_answers() {
  DOCKER_HOST=$1 timeout 10 docker version >/dev/null 2>&1
}

# Exports DOCKER_HOST of a daemon that answers. The own daemon comes before the default one: the
# cluster is in it, even when another daemon has appeared since.
find_docker() {
  local host
  command -v docker >/dev/null || return 1
  for host in "${DOCKER_HOST:-}" "$OWN_HOST" unix:///var/run/docker.sock; do
    if [[ -n $host ]] && docker_answers "$host"; then
      export DOCKER_HOST=$host
      return
    fi
  done
  return 1
}

ensure_docker() {
  find_docker && return
  start_own_docker
}

is_own_docker() {
  [[ ${DOCKER_HOST:-} == "$OWN_HOST" ]]
}

# runs_with PIDFILE TEXT: a process id may belong to another process by now.
runs_with() {
  local pid
  pid=$(cat "$1" 2>/dev/null) && [[ -n $pid ]] &&
    tr '\0' ' ' <"/proc/$pid/cmdline" 2>/dev/null | grep -qF -- "$2"
}

own_docker_runs() {
  runs_with "$OWN_RUN/docker.pid" "$OWN_RUN"
}

start_own_docker() {
  require_root "starting a Docker daemon"
  install_missing docker=docker.io dockerd=docker.io containerd=containerd runc=runc \
    iptables=iptables /usr/bin/python3=python3
  # Where an init system runs, the package has started its daemon.
  find_docker && return
  clear_stale_pids
  write_daemon_config
  log "starting an own Docker daemon (data: $OWN_DOCKER/data, log: $OWN_DOCKER/log)"
  current_log=$OWN_DOCKER/log
  launch_dockerd
  wait_until 90 own_docker_settled || die "the Docker daemon did not answer within 90 s"
  own_docker_runs || die "the Docker daemon stopped"
  current_log=
  export DOCKER_HOST=$OWN_HOST
}

# A daemon that was killed leaves files that name its processes, and refuses to start when those
# ids are in use again.
clear_stale_pids() {
  local file
  for file in "$OWN_RUN/docker.pid" "$OWN_RUN/exec/containerd/containerd.pid"; do
    runs_with "$file" "$OWN_RUN" || rm -f "$file"
  done
}

# dockerd would adopt a containerd of the machine that it finds at the default address; in a mount
# namespace of its own it finds only its own.
launch_dockerd() {
  mkdir -p /run/containerd "$OWN_RUN/containerd"
  # shellcheck disable=SC2016
  setsid unshare --mount --propagation slave bash -c \
    'mount --bind "$1" /run/containerd && shift && exec dockerd "$@"' dockerd "$OWN_RUN/containerd" \
    --config-file "$OWN_DOCKER/daemon.json" --data-root "$OWN_DOCKER/data" \
    --exec-root "$OWN_RUN/exec" --host "$OWN_HOST" --pidfile "$OWN_RUN/docker.pid" \
    --bridge none >"$OWN_DOCKER/log" 2>&1 </dev/null 3>&- 9>&- &
  dockerd_pid=$!
}

own_docker_settled() {
  docker_answers "$OWN_HOST" || ! kill -0 "$dockerd_pid" 2>/dev/null
}

write_daemon_config() {
  local shim=$OWN_DOCKER/runc-shim
  mkdir -p "$OWN_DOCKER" "$OWN_RUN"
  if has_all_capabilities; then
    echo '{}' >"$OWN_DOCKER/daemon.json"
    return
  fi
  log "this machine withholds capabilities: containers get what is left"
  # A copy, so that the daemon outlives the checkout.
  install -m 755 "$LIB/node/runc_shim.py" "$shim"
  printf '{"runtimes": {"bounded": {"path": "%s"}}, "default-runtime": "bounded"}\n' "$shim" \
    >"$OWN_DOCKER/daemon.json"
}

has_all_capabilities() {
  local last bounding
  last=$(cat /proc/sys/kernel/cap_last_cap)
  bounding=$(awk '/^CapBnd/ {print $2}' /proc/self/status)
  ((0x$bounding == (1 << (last + 1)) - 1))
}

stop_own_docker() {
  local pid
  own_docker_runs || return 0
  pid=$(cat "$OWN_RUN/docker.pid")
  kill "$pid"
  # It gives containers 10 s to stop before it kills them.
  timeout 60 tail --pid "$pid" -f /dev/null || die "the own Docker daemon (process $pid) does not stop"
  rm -rf "$OWN_RUN"
  log "stopped the own Docker daemon (process $pid); its images stay in $OWN_DOCKER/data"
}
