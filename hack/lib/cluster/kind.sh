# shellcheck shell=bash disable=SC2034,SC2153,SC2154
# The cluster itself: its configuration, its creation, its health.

export KIND_EXPERIMENTAL_PROVIDER=docker

SYSTEM_NAMESPACES=(kube-system local-path-storage)
# Lines of a pod's node and when its container began; there is one container in each of the system's.
CONTAINERS_TEMPLATE='{range .items[*]}{.spec.nodeName} {.status.containerStatuses[0].state.running.startedAt}{"\n"}{end}'

kind() {
  "$(binary kind)" "$@"
}

kubectl() {
  "$(binary kubectl)" --kubeconfig "$KUBECONFIG_FILE" "$@"
}

# cluster_nodes [DOCKER PS OPTION…]: the containers that are this cluster's nodes.
cluster_nodes() {
  docker ps --all --filter "label=io.x-k8s.kind.cluster=$CLUSTER" --format '{{.Names}}' "$@" | sort
}

# The version that the cluster was created with; nothing without a cluster.
cluster_kubernetes() {
  cat "$STATE/kubernetes" 2>/dev/null || true
}

# Selects the cluster's version, or what this checkout has of its minor version; kubectl and the API
# server must not be far apart.
select_cluster_kubernetes() {
  local minor
  minor=$(minor_of "$(cluster_kubernetes)")
  ! kubernetes_minors | grep -qxF -- "$minor" || select_kubernetes "$minor"
}

worker_name() {
  (($1 == 1)) && echo "$CLUSTER-worker" || echo "$CLUSTER-worker$1"
}

fake_gpu_folder() {
  echo "$STATE/fake-gpu/$(worker_name "$1")"
}

# worker_topology INDEX: the last file serves all further workers.
worker_topology() {
  local index=$(($1 - 1)) last=$((${#topologies[@]} - 1))
  echo "${topologies[index < last ? index : last]}"
}

write_kind_config() {
  local index
  cat <<EOF
kind: Cluster
apiVersion: kind.x-k8s.io/v1alpha4
name: $CLUSTER
networking:
  # Apart from the defaults: a cluster beside or around this one would catch its first calls.
  podSubnet: 10.212.0.0/16
  serviceSubnet: 10.213.0.0/16
EOF
  write_host_patches
  echo 'nodes:'
  echo '  - role: control-plane'
  for ((index = 1; index <= workers; index++)); do
    cat <<EOF
  - role: worker
    labels:
      ai.deckhouse.io/gpu: "true"
    extraMounts:
      - hostPath: "$(fake_gpu_folder "$index")"
        containerPath: /opt/fake-gpu
EOF
  done
}

# What the nodes need because of the machine below them.
write_host_patches() {
  if [[ ! -f /sys/fs/cgroup/cgroup.controllers ]]; then
    cat <<'EOF'
kubeadmConfigPatches:
  - |
    kind: KubeletConfiguration
    failCgroupV1: false
EOF
  fi
  if ! has_all_capabilities; then
    cat <<'EOF'
containerdConfigPatches:
  - |
    [plugins."io.containerd.grpc.v1.cri"]
      restrict_oom_score_adj = true
EOF
  fi
}

# Two runs of `up` that print the same ask for the same cluster.
fingerprint() {
  local index
  docker image inspect --format '{{.Id}}' "$node_image"
  write_kind_config
  for ((index = 1; index <= workers; index++)); do
    sha256sum <"$(worker_topology "$index")"
  done
}

is_wanted_cluster() {
  [[ -s $KUBECONFIG_FILE && $(cluster_nodes | wc -l) == $((workers + 1)) ]] && fingerprint | cmp -s - "$STATE/fingerprint"
}

# wait_ready SECONDS: nodes, then what every cluster runs.
wait_ready() {
  local namespace workload
  kubectl wait node --all --for=condition=Ready --timeout="$1s" || return 1
  wait_until "$1" system_began_since_boot || return 1
  for namespace in "${SYSTEM_NAMESPACES[@]}"; do
    for workload in $(kubectl --namespace "$namespace" get daemonset,deployment --output name); do
      kubectl --namespace "$namespace" rollout status "$workload" --timeout="$1s" || return 1
    done
  done
}

# What ran on a restarted node counts as ready until its kubelet reports again, so ask when it began.
system_began_since_boot() {
  local namespace node began found=0
  declare -A booted
  while read -r node began; do
    booted[${node#/}]=${began:0:19}
  done < <(cluster_nodes | xargs docker inspect --format '{{.Name}} {{.State.StartedAt}}')
  for namespace in "${SYSTEM_NAMESPACES[@]}"; do
    while read -r node began; do
      [[ -n $began && -n ${booted[$node]:-} && ! ${began:0:19} < ${booted[$node]} ]] || return 1
      found=1
    done < <(kubectl --namespace "$namespace" get pods --output jsonpath="$CONTAINERS_TEMPLATE")
  done
  ((found))
}

# A healthy cluster answers at once; one whose nodes were stopped gets started and some time.
revive_cluster() {
  local stopped limit=30
  stopped=$(cluster_nodes --filter status=exited --filter status=created --filter status=paused)
  if [[ -n $stopped ]]; then
    log "starting stopped nodes: ${stopped//$'\n'/ }"
    # shellcheck disable=SC2086
    docker start $stopped >/dev/null || return 1
    limit=120
  fi
  wait_until "$limit" api_answers || return 1
  wait_ready "$limit" >"$LOGS/revive.log" 2>&1
}

api_answers() {
  kubectl get --raw /readyz --request-timeout=5s >/dev/null 2>&1
}

# A kubelet that gets no inotify instance runs on and never notices a plugin, so that no driver
# registers on its node. Nodes share the machine's limit, and 128, the default, is two clusters' worth.
ensure_inotify_instances() {
  local limit=/proc/sys/fs/inotify/max_user_instances wanted=512
  (($(cat "$limit") < wanted)) || return 0
  log "raising fs.inotify.max_user_instances from $(cat "$limit") to $wanted until the next boot"
  echo "$wanted" 2>/dev/null >"$limit" || log "that is not allowed here: nodes may miss the node plugin"
}

create_cluster() {
  rm -rf "$STATE/fake-gpu"
  prepare_fake_gpus
  ensure_inotify_instances
  write_kind_config >"$STATE/kind.yaml"
  echo "$kubernetes" >"$STATE/kubernetes"
  log "creating the cluster $CLUSTER of Kubernetes ${kubernetes#v}: one control plane, $workers workers"
  exit_steps+=(keep_logs_of_failure)
  quietly kind-create kind create cluster --config "$STATE/kind.yaml" --image "$node_image" \
    --kubeconfig "$KUBECONFIG_FILE" --wait 180s --retain
  log "waiting for the nodes and the system's pods"
  quietly kind-ready expect_ready
  fingerprint >"$STATE/fingerprint"
}

expect_ready() {
  wait_ready 180
}

# kind would delete the nodes of a failed start, and with them what tells why.
keep_logs_of_failure() {
  [[ -s $STATE/fingerprint ]] && return
  log "keeping the nodes' logs in $LOGS/nodes"
  rm -rf "$LOGS/nodes"
  kind export logs --name "$CLUSTER" "$LOGS/nodes" >/dev/null 2>&1 || true
}

# Also for nodes that run: they get what this checkout builds, and keep their GPUs' state.
prepare_fake_gpus() {
  local index folder
  for ((index = 1; index <= workers; index++)); do
    folder=$(fake_gpu_folder "$index")
    log "making the fake GPUs of $(worker_name "$index") from $(worker_topology "$index")"
    mkdir -p "$folder"
    # The name makes the GPUs' UUIDs differ between nodes. Whatever the command leaves running in
    # the background must not hold the lock.
    quietly "fake-gpu-$index" "$FAKE_GPU_NODE" "$(worker_topology "$index")" "$folder" \
      --name "$(worker_name "$index")" 9>&-
  done
}

delete_cluster() {
  rm -f "$STATE/fingerprint"
  if [[ -n $(cluster_nodes) ]]; then
    log "deleting the cluster $CLUSTER"
    mkdir -p "$STATE"
    quietly kind-delete kind delete cluster --name "$CLUSTER" --kubeconfig "$KUBECONFIG_FILE"
  fi
  rm -rf "$STATE"
}
