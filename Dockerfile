# cxda on NVIDIA GPUs: docker build -t cxda . && docker run --gpus=all -v "$PWD:/here" cxda demo
FROM python:3.12-slim
COPY pyproject.toml README.md LICENSE /source/
COPY cxda_jax /source/cxda_jax
COPY configs /source/configs
COPY launch /source/launch
RUN pip install --no-cache-dir /source 'jax[cuda12]' && rm -r /source
ENV CXDA_DATA_DIR=/here/data JAX_COMPILATION_CACHE_DIR=/here/compiled HOME=/here
WORKDIR /here
ENTRYPOINT ["cxda"]
