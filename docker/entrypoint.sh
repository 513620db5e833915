#!/bin/sh
# What a container does: `server`, `worker`, or any command (`ratchet run --preset demo`).
set -eu

case "${1:-}" in
server)
    # All addresses of the container; compose publishes the port on the host's loopback only.
    exec python -m flows.server.server ui 4200 0.0.0.0
    ;;
worker)
    exec python -m flows.deployment.serve
    ;;
*)
    exec "$@"
    ;;
esac
