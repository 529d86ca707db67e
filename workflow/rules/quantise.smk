# The checkpoint in NF4, for options with `four_bit: shard`.


rule quantise:
    input:
        model=f"work/{RUN}/model.json",
    output:
        directory(f"work/{RUN}/{SHARD}"),
    log:
        f"{LOGS}/quantise.log",
    priority: FIRST
    container:
        image(SHARD_STACK)
    threads: CORES
    resources:
        config=CONFIG_PATH,
        gpu=int(DEVICE != "cpu"),
        stack=SHARD_STACK,
    params:
        dtype=CONFIG.model.dtype,
        four_bit=CONFIG.four_bit.model_dump_json(),
        code=CODE["quantise"],
        lock=LOCKS[SHARD_STACK],
        device=DEVICE,
    shell:
        "flexroll --stack {resources.stack} quantise --config {resources.config:q} --model {input.model}"
        " --out-dir {output} 2>&1 | tee {log}"
