# Two images from one file:
#   docker build --target api    -t kernelwright-api .       serves and answers; no GPU stack
#   docker build --target worker -t kernelwright-worker .    tunes; needs --gpus all
# Both take the database from KERNELWRIGHT_DB; give them the same one.

FROM python:3.12-slim AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels . && cp constraints.txt /wheels/

FROM python:3.12-slim AS base
ENV PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
COPY --from=build /wheels /wheels
RUN pip install --constraint /wheels/constraints.txt "$(ls /wheels/*.whl)[model,postgres]" \
    && useradd --create-home kernelwright \
    && install -d -o kernelwright /data
ENV KERNELWRIGHT_DB=sqlite:////data/kernelwright.db
VOLUME /data

FROM base AS worker
# Triton builds its launcher with the C compiler of the machine it runs on.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --constraint /wheels/constraints.txt "$(ls /wheels/*.whl)[model,postgres,torch]"
USER kernelwright
ENTRYPOINT ["kernelwright"]
CMD ["worker"]

FROM base AS api
ENV KERNELWRIGHT_HOST=0.0.0.0
EXPOSE 8765
USER kernelwright
ENTRYPOINT ["kernelwright"]
CMD ["serve"]
