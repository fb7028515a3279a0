#!/usr/bin/python3 -IS
"""An OCI runtime that asks runc for no more capabilities than this machine can grant.

Older Docker engines request every capability for a privileged container; runc fails the whole
request when the bounding set lacks one. This only removes from a request, it never adds.
"""

import json
import os
import shutil
import sys

# In the order of their numbers in linux/capability.h.
CAPABILITIES = """
chown dac_override dac_read_search fowner fsetid kill setgid setuid setpcap linux_immutable
net_bind_service net_broadcast net_admin net_raw ipc_lock ipc_owner sys_module sys_rawio sys_chroot
sys_ptrace sys_pacct sys_admin sys_boot sys_nice sys_resource sys_time sys_tty_config mknod lease
audit_write audit_control setfcap mac_override mac_admin syslog wake_alarm block_suspend audit_read
perfmon bpf checkpoint_restore
""".split()


def granted():
    with open("/proc/self/status", encoding="ascii") as status:
        line = next(line for line in status if line.startswith("CapBnd:"))
    bounding = int(line.split()[1], 16)
    return {
        "CAP_" + name.upper() for bit, name in enumerate(CAPABILITIES) if bounding >> bit & 1
    }


def option(arguments, *names):
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            return value if equals else arguments[position + 1]
    return None


def request_file(arguments):
    """The file that holds the process to start, for the commands that start one."""
    if "create" in arguments or "run" in arguments:
        return os.path.join(option(arguments, "--bundle", "-b") or ".", "config.json")
    if "exec" in arguments:
        return option(arguments, "--process", "-p")
    return None


def limit(path):
    with open(path, encoding="utf-8") as source:
        request = json.load(source)
    sets = request.get("process", request).get("capabilities") or {}
    allowed = granted()
    for name in sets:
        sets[name] = [capability for capability in sets[name] if capability in allowed]
    with open(path, "w", encoding="utf-8") as target:
        json.dump(request, target)


def main():
    path = request_file(sys.argv[1:])
    if path:
        limit(path)
    runc = shutil.which("runc", path="/usr/local/sbin:/usr/sbin:/usr/local/bin:/usr/bin:/sbin:/bin")
    os.execv(runc, ["runc"] + sys.argv[1:])


main()
