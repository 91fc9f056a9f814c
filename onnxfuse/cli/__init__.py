"""The command line: parse, call, render. Nothing else imports click or rich."""
