# docker build --tag gpt-cli .
# docker run --rm gpt-cli generate --model tiny "Once upon a time"
# docs/install.md says how to start the server on a port or on a socket.
FROM python:3.13-slim-trixie AS build
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev make \
    && rm -rf /var/lib/apt/lists/*
RUN useradd --create-home --uid 1000 builder \
    && install --directory --owner builder /home/builder/gpt-cli
USER 1000
WORKDIR /home/builder/gpt-cli
COPY --chown=1000 . .
RUN make wheel

# The two commands of README.md: docker build --target test .
FROM build AS test
RUN make demo && make test

FROM python:3.13-slim-trixie
# hadolint ignore=DL3013
RUN --mount=type=bind,from=build,source=/home/builder/gpt-cli/dist,target=/dist \
    set -- /dist/*.whl \
    && pip install --no-cache-dir "$1[serve]" \
    && useradd --create-home --uid 1000 user \
    && install --directory --owner user /models
USER 1000
WORKDIR /home/user
# The cache of downloaded models.
ENV HF_HOME=/models
VOLUME /models
EXPOSE 8000
ENTRYPOINT ["gpt-cli"]
# Other machines are refused without GPT_CLI_API_KEY.
CMD ["serve", "--host", "0.0.0.0"]
