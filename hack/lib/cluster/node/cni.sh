#!/bin/sh
# The pod network: this node's CNI configuration from its podCIDR, a route to every other node's
# podCIDR, and masquerading of what leaves the pod network. Follows the nodes as they come and change
# address.
set -eu

conflist=/etc/cni/net.d/10-pods.conflist
template='{.metadata.name}|{.spec.podCIDR}|{.status.addresses[?(@.type=="InternalIP")].address}{"\n"}'

masquerade() {
  set -- POSTROUTING -s "$POD_SUBNET" ! -d "$POD_SUBNET" -j MASQUERADE
  iptables -w -t nat -C "$@" 2>/dev/null || iptables -w -t nat -A "$@"
}

# containerd reads the folder at any time, so the file appears only when it is complete.
configure() {
  cat >"$conflist.partial" <<EOF
{"cniVersion": "1.0.0", "name": "pods", "plugins": [
  {"type": "ptp", "mtu": $(cat /sys/class/net/eth0/mtu), "ipMasq": false, "ipam": {
    "type": "host-local", "dataDir": "/run/cni-ipam-state",
    "ranges": [[{"subnet": "$1"}]], "routes": [{"dst": "0.0.0.0/0"}]}},
  {"type": "portmap", "capabilities": {"portMappings": true}}]}
EOF
  mv "$conflist.partial" "$conflist"
  echo "this node's pods: $1"
}

follow() {
  kubectl get nodes --watch --output "jsonpath=$template" | while IFS='|' read -r name cidr address; do
    if [ -z "$cidr" ] || [ -z "$address" ]; then
      continue
    elif [ "$name" != "$NODE_NAME" ]; then
      ip route replace "$cidr" via "$address"
    elif ! grep -qsF "\"$cidr\"" "$conflist"; then
      configure "$cidr"
    fi
  done
}

masquerade
while true; do
  # The server ends a watch after some minutes, and cannot be reached before kube-proxy has run.
  follow || true
  sleep 1
done
