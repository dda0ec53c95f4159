# ptdbench in a container: by itself, or added to an image that has PyTorch already.
#
#   docker build -t ptdbench .
#   docker run --rm ptdbench                                    # make bench: ddp, pdp and fsdp on two CPU ranks
#   docker run --rm --gpus all --ipc host ptdbench python train.py model=gpt_xl parallel=fsdp
#   docker build --build-arg BASE=<an image with PyTorch 2.11 or newer> -t ptdbench-own .
ARG BASE=python:3.12-slim
FROM ${BASE}

RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ git make \
    && rm -rf /var/lib/apt/lists/*

# An unprivileged user; mount a volume at /home/bench/ptdbench/outputs to keep results.
RUN useradd --create-home bench
COPY --chown=bench . /home/bench/ptdbench
USER bench
WORKDIR /home/bench/ptdbench

# --system-site-packages: an image's own PyTorch is used where it is new enough, and downloaded where there is none.
RUN python3 -m venv --system-site-packages .venv && make install
ENV PATH=/home/bench/ptdbench/.venv/bin:$PATH

CMD ["make", "bench"]
