"""Models larger than memory: some weights stay in memory, the others are streamed from flash.

The plugin follows ActiveFlow ("Scaling Up On-Device LLMs via Active-Weight Swapping Between DRAM
and Flash"). The default mode ``exact`` uses every weight for every token. The mode ``sparse`` uses
only the largest values of each activation while decoding, and reads only the weights that they
need. It is faster, but the text differs from the model's.
"""
