#!/usr/bin/env bash
# The gain of cxda_shares on networks of the paper's width, with and without images that the network left out.
#
#   docs/study/paper_width.sh RUNS [,smoke]
#
# $CXDA_DATA_DIR has unipen and cifar10_c, as cxda prepare leaves them; what is missing there is left out. It is meant
# for 12 minutes on one H100. The same command goes on where it was ended. Each run's result.json and right.json, and
# the tables that it prints, say what was found. What a network knows by heart is in RUNS/*/*/*/right.json.
set -euo pipefail
runs=$1 variant=${2:-}
data=${CXDA_DATA_DIR:-$HOME/.cache/cxda_jax}

train() { # benchmark, the part that the network leaves out, seed
    cxda train --config="$1:cxda_shares$variant" --config.cxda_shares.held_out="$2" --config.seed="$3" \
        --config.net.width=128 --config.net.dtype=bfloat16 --workdir="$runs/$1/$2/$3"
}

tell() { # benchmark, the part that the network leaves out: gains over none, and over erm_iid on all training images
    for shares in natural dirichlet even; do
        for domains in 1 5; do
            cxda evaluate --runs="$runs/$1/$2/*,$runs/$1/0.0/*/network" --context=0,100 --against=erm_iid \
                --config.episode.num_domains=$domains --config.episode.per_domain=$((100 / domains)) \
                --config.episode.shares=$shares --config.episode.skip_small=true
        done
    done
}

for benchmark in unipen cifar10_c; do
    [[ -d $data/$benchmark ]] || continue
    for seed in 0 1 2; do
        train $benchmark 0.35 $seed
        # 56,000 steps of cifar10_c take minutes, so one seed without images that are left out must do.
        if [[ $benchmark == unipen || $seed == 0 ]]; then train $benchmark 0.0 $seed; fi
    done
    cxda diagnose --run="$runs/$benchmark/0.35/0/network"
    for share in 0.35 0.0; do tell $benchmark $share; done
done
