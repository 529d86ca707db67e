# GRPO on every rollout backend: the questions all of them train on, then one process a run.

if TRAININGS:

    rule grpo_questions:
        input:
            model=f"work/{RUN}/model.json",
        output:
            f"work/{RUN}/grpo/questions.json",
        log:
            f"{LOGS}/grpo_questions.log",
        priority: FIRST
        container:
            image(STACKS[0])
        resources:
            config=CONFIG_PATH,
            gpu=0,
            stack=STACKS[0],
        params:
            prompts=(CONFIG.grpo.prompts or CONFIG.prompts).model_dump_json(),
            limits=[CONFIG.max_model_len, CONFIG.grpo.max_completion_length],
            least=CONFIG.grpo.prompts_per_step,
            code=CODE["grpo_questions"],
        shell:
            "flexroll --stack {resources.stack} grpo-questions --config {resources.config:q} --model {input.model}"
            " --out {output} 2>&1 | tee {log}"

    rule grpo:
        input:
            preflight=ancient(PREFLIGHT),
            model=f"work/{RUN}/model.json",
            questions=f"work/{RUN}/grpo/questions.json",
        output:
            f"results/{RUN}/grpo/{{training}}.json",
        log:
            f"{LOGS}/grpo-{{training}}.log",
        priority: lambda wildcards: PRIORITY[wildcards.training]
        container:
            lambda wildcards: image(TRAININGS[wildcards.training].stack)
        # All cores: two measurements side by side spoil both.
        threads: CORES
        resources:
            **SEEDS,
            config=CONFIG_PATH,
            gpu=int(DEVICE != "cpu"),
            runtime=int(CONFIG.grpo.run_s / 60) + 2,
        params:
            stack=lambda wildcards: TRAININGS[wildcards.training].stack,
            key=lambda wildcards: TRAINING_KEYS[wildcards.training],
            work=lambda wildcards: f"work/{RUN}",
        shell:
            "flexroll --stack {params.stack} grpo --config {resources.config:q} --run-name {wildcards.training}"
            " --work {params.work} --out {output} 2>&1 | tee {log}"
