"""Models larger than memory: some weights stay in memory, the others are streamed from flash.

After ActiveFlow (papers: "Scaling Up On-Device LLMs via Active-Weight Swapping Between DRAM and
Flash"), without its approximation: every weight is used for every token.
"""
