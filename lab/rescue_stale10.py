from lab.rescue import program

main = program(fresh_from=0, stale_from=10)
