#!/bin/bash
# One training on all hosts of a Cloud TPU slice, which is made for it and deleted at its end. Run this in a clone of the
# repository. `bash docs/examples/cluster/tpu_slice.sh` again, after a failure, goes on from what has been copied here.
set -eu
slice=cxda zone=us-west4-a run=runs/glyphs/cxda/0
tpu() { gcloud compute tpus tpu-vm "$1" "${@:2}" --zone="$zone"; }

tpu create "$slice" --accelerator-type=v5litepod-16 --version=v2-alpha-tpuv5-lite
trap 'tpu delete "$slice" --quiet' EXIT
tpu scp --recurse --worker=all . "$slice":cxda
tpu ssh "$slice" --worker=all --command="cd cxda && pip install -q uv && \
    python3 -m uv run --python=3.12 --with='jax[tpu]' cxda train \
    --config=glyphs:cxda --config.train.tasks_per_step=16 --workdir=$run --distributed" || echo "it ended early" >&2
mkdir -p "$(dirname "$run")"
tpu scp --recurse --worker=0 "$slice:cxda/$run" "$(dirname "$run")"
