"""The methods that the MURPHY paper compares with, each a file that replaces only what differs: what is expanded, what a program's
return is, what the loss is. A file has `step`, with the arguments and results of murphy.murphy_step, and `add_head` if it needs one.
GRPO and GRPO-MT differ from MURPHY by a few lines and live in murphy.py; Reflexion is eval.py --scaffold reflexion.
"""
