# marlhf in a container, built in a clone:
#   docker build -t marlhf .                                                           for a CPU
#   docker build -t marlhf --build-arg TORCH_INDEX=https://pypi.org/simple .           for CUDA
# PyPI's torch for Linux has CUDA. For another CUDA version give its index of download.pytorch.org.
FROM python:3.12-slim

ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hub,lora,code,judge,tensorboard

# torch.compile and Triton call a C compiler.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /src
COPY constraints.txt ./
# A layer of its own: a change of marlhf does not fetch torch again.
RUN pip install --no-cache-dir -c constraints.txt --extra-index-url ${TORCH_INDEX} torch
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY src src
COPY recipes recipes
RUN pip install --no-cache-dir -c constraints.txt ".[${EXTRAS}]"

RUN useradd --create-home --uid 1000 marlhf && install -d -o marlhf /home/marlhf/runs
USER marlhf
WORKDIR /home/marlhf
VOLUME /home/marlhf/runs
ENTRYPOINT ["marlhf"]
CMD ["doctor"]
