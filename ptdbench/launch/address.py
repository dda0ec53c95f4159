"""Address of the rendezvous: a host and a port that each rank determines without asking another."""

import socket
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from ipaddress import ip_address
from pathlib import Path

from ptdbench.launch.slurm import expand_hosts
from ptdbench.launch.world import World
from ptdbench.problems import ConfigError, Problem

#: This machine, for ranks that are all on it.
HERE = "127.0.0.1"

#: torch's default rendezvous port, for launches that nothing identifies.
FALLBACK_PORT = 29500

#: Services usually use ports below this one.
_FIRST_PORT = 10000
#: The kernel's range of ephemeral ports: the first and the last.
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")
#: Linux's default for the first ephemeral port.
_FIRST_EPHEMERAL = 32768

#: Variables that identify the job if the launcher's own are unset. Not the SLURM step: each node's helper has its own.
_JOB_IDS = (("SLURM_JOB_ID",), ("LSB_JOBID", "LSB_JOBINDEX"), ("PBS_JOBID",))


def listen(host: str, port: int, on_all: bool = False) -> tuple[int, int]:
    """Listen for the ranks on the address that they will connect to, and on no other; port 0 picks any free port.

    With ``on_all``, listen on all addresses unless that one is for this machine alone: the host of a container may
    forward the port.

    Returns:
        ``(port, descriptor)`` of the listening socket, which the caller owns.

    Raises:
        OSError: The port is taken, or the host is not this machine.
    """
    family, _, _, _, resolved = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = str(resolved[0])
    if host not in ("localhost", HERE) and (on_all or ip_address(address).is_loopback):
        # Debian resolves a machine's own name to 127.0.1.1, which no other machine can reach.
        family, address = (family, "::") if family == socket.AF_INET6 and on_all else (socket.AF_INET, "0.0.0.0")
    with socket.create_server((address, port), family=family, backlog=socket.SOMAXCONN) as server:
        return server.getsockname()[1], server.detach()


def meeting_point(world: World, environ: Mapping[str, str]) -> tuple[str, int]:
    """Return host and port of rank 0; ``MASTER_ADDR`` and ``MASTER_PORT``, as torchrun sets them, take precedence.

    Raises:
        ConfigError: The host of rank 0 cannot be determined from here, or ``MASTER_PORT`` is invalid.
    """
    host, preset = _host(world, environ), environ.get("MASTER_PORT")
    if not preset:
        return host, _derived_port(launch_id(world, environ))
    if not (preset.isdecimal() and 1 <= int(preset) <= 65535):
        remedy = "unset it, and the port follows from the job"
        raise ConfigError([Problem("MASTER_PORT", preset, "must be a port, from 1 to 65535", remedy)])
    return host, int(preset)


def launch_id(world: World, environ: Mapping[str, str]) -> str:
    """Return an identifier of this launch, known to all its ranks; empty if there is none."""
    for names in (*world.started_by.names, *_JOB_IDS):
        if environ.get(names[0]):
            return " ".join(f"{name}={environ.get(name, '')}" for name in names)
    return ""


def _host(world: World, environ: Mapping[str, str]) -> str:
    if preset := environ.get("MASTER_ADDR"):
        return preset
    if world.local_size == world.size:
        return "localhost"
    # Under mpirun SLURM's step may lack the node that mpirun runs on.
    name = "SLURM_STEP_NODELIST" if world.started_by.has_step else "SLURM_JOB_NODELIST"
    listed = environ.get(name, "")
    try:
        if hosts := expand_hosts(listed):
            return hosts[0]
    except ValueError as error:
        remedy = "set MASTER_ADDR to the host of rank 0 for all ranks"
        raise ConfigError([Problem(name, listed, str(error), remedy)]) from None
    rule = f"{world.launcher} does not tell the ranks of other nodes where rank 0 is"
    remedy = "set it to the host of rank 0 for all ranks, for example mpirun -x MASTER_ADDR=host"
    raise ConfigError([Problem("MASTER_ADDR", "(not set)", rule, remedy)])


def _derived_port(identity: str) -> int:
    """Return a port that is the same in every process, and below the ephemeral ones unless nearly all ports are."""
    if not identity:
        return FALLBACK_PORT
    end = _FIRST_EPHEMERAL
    with suppress(OSError, ValueError, IndexError):  # not Linux
        first = int(_EPHEMERAL.read_text().split()[0])
        end = first if first >= _FIRST_PORT + 1000 else end
    return _FIRST_PORT + int.from_bytes(sha256(identity.encode()).digest()[:8], "big") % (end - _FIRST_PORT)
